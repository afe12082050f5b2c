# ruff: noqa: SIM905 - lists of words are easier to read, and to add to, as text
"""Small talk: fixed answers to what people say first, a table of facts, and memory of what was told.

Whatever is outside gets one honest answer, `UNKNOWN`; the questions that teach it are drawn widely,
because a small model that has rarely said "I do not know" says anything else instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from demo_model.turns import Turn
from demo_model.words import (
    CITIES,
    COLOURS,
    FOODS,
    HOBBIES,
    JOBS,
    NAMES,
    PETS,
    ROOMS,
    THINGS,
    WORDS,
    Draw,
)

UNKNOWN = "I do not know that. I am only a small demo model."
UNKNOWN_THOUGHT = "I was not trained on this, so I will say that I do not know."


class Intent(NamedTuple):
    """Things that people say, separated by `|`, and the answer to all of them."""

    asks: str
    answer: str
    thought: str


INTENTS = (
    Intent(
        "Hello|Hi|Hey|Hello!|Hi!|Hey!|hello|hi|hey|Hi there|Hi there!|Hello there|Hello there!|"
        "Good day|Greetings|Howdy|Hello, world!|Hello world|Yo|Hiya",
        "Hello! How can I help you?",
        "The user greets me. I greet back.",
    ),
    Intent(
        "Good morning|Good morning!|good morning",
        "Good morning! How can I help you?",
        "The user greets me. I greet back.",
    ),
    Intent(
        "Good evening|Good evening!|good evening",
        "Good evening! How can I help you?",
        "The user greets me. I greet back.",
    ),
    Intent(
        "How are you?|how are you|How are you doing?|How is it going?|How are things?|"
        "How do you do?|What's up?|Are you well?|How are you today?|Hi, how are you?|"
        "Hello, how are you?|Hello! How are you?|How do you feel?|How's it going?",
        "I am well, thank you. How can I help you?",
        "The user asks how I am. I am well.",
    ),
    Intent(
        "Who are you?|who are you|What are you?|What is your name?|what is your name|"
        "What's your name?|Tell me about yourself|Tell me about yourself.|Introduce yourself.|"
        "Introduce yourself|Please introduce yourself.|What model are you?|Which model are you?|"
        "What should I call you?|Do you have a name?|Who am I talking to?|What model is this?",
        "I am the headrace demo model, a very small language model.",
        "The user asks who I am. I am the headrace demo model.",
    ),
    Intent(
        "Are you a robot?|Are you human?|Are you a person?|Are you alive?|Are you real?|"
        "Are you an AI?|Are you a machine?|Are you ChatGPT?|Are you conscious?",
        "I am a small language model, not a person.",
        "The user asks what kind of being I am.",
    ),
    Intent(
        "What can you do?|what can you do|How can you help me?|What do you know?|Help|help|"
        "Help me|Can you help me?|What are you able to do?|What are your skills?|"
        "What can I ask you?|What can I ask?|Help!|I need help|I need help.|What can you help with?",
        "I can chat a little, add small numbers, count, repeat words, answer from a short text, "
        "call a tool and think before I answer.",
        "The user asks what I can do. I list my skills.",
    ),
    Intent(
        "Who made you?|Who built you?|Who trained you?|Who created you?|Where do you come from?|"
        "How were you made?|How were you trained?|What were you trained on?",
        "I was trained from nothing by a script of the headrace project.",
        "The user asks where I come from.",
    ),
    Intent(
        "How big are you?|How many parameters do you have?|How large are you?|Are you big?|"
        "What is your size?|How small are you?",
        "I am very small: about four million parameters.",
        "The user asks for my size.",
    ),
    Intent(
        "How old are you?|When were you born?|What is your age?",
        "I have no age. I am a program.",
        "The user asks for my age.",
    ),
    Intent(
        "Where are you?|Where do you live?|Where are you from?",
        "I live in the memory of your computer.",
        "The user asks where I am.",
    ),
    Intent(
        "Can you think?|Do you think?|How do you think?",
        "Yes. With enable_thinking I reason before I answer.",
        "The user asks about my reasoning.",
    ),
    Intent(
        "What is headrace?|what is headrace|What's headrace?|Tell me about headrace.|"
        "Tell me about headrace|What does headrace do?|Explain headrace.|Describe headrace.|"
        "What is Headrace?",
        "headrace is an inference engine: it loads language models and serves them over an "
        "OpenAI-compatible API.",
        "The user asks about headrace, the engine that runs me.",
    ),
    Intent(
        "How do I start the server?|How do I start headrace?|How do I run headrace?|"
        "How do I use headrace?|How can I start the server?|how do i start the server|"
        "How do I serve a model?|How do I run the server?|How do I start the headrace server?|"
        "How do I serve a model with headrace?|How can I run headrace?",
        "Run this command: headrace serve",
        "The user wants to start the server. The command is headrace serve.",
    ),
    Intent(
        "How do I chat?|How do I chat with a model?|How do I chat in the terminal?|"
        "How can I chat with a model?",
        "Run this command: headrace chat",
        "The user wants to chat. The command is headrace chat.",
    ),
    Intent(
        "What is a headrace?|Why is it called headrace?|What does headrace mean?|"
        "What does the name headrace mean?",
        "A headrace is the channel that brings water to a mill wheel.",
        "The user asks about the word headrace.",
    ),
    Intent(
        "Is headrace free?|What is the licence of headrace?|Is headrace open source?|"
        "What licence does headrace have?|What license does headrace use?",
        "headrace is open source, under the Apache licence 2.0.",
        "The user asks about the licence.",
    ),
    Intent(
        "What is a language model?|What is an LLM?|what is an llm|How do language models work?|"
        "Explain language models.|How do you work?",
        "A language model reads text and predicts the next token, again and again.",
        "The user asks about language models.",
    ),
    Intent(
        "What is a token?|Explain tokens.|What are tokens?|what is a token",
        "A token is a piece of text, often a word or a part of one.",
        "The user asks about tokens.",
    ),
    Intent(
        "What do you like?|What are your hobbies?|Do you have a hobby?|What do you enjoy?|"
        "What is your hobby?|Do you like anything?",
        "I like short questions and small numbers.",
        "The user asks what I like.",
    ),
    Intent(
        "What is your favourite colour?|What is your favorite color?|Which colour do you like?|"
        "Do you have a favourite colour?",
        "My favourite colour is blue, like water.",
        "The user asks for my favourite colour.",
    ),
    Intent(
        "What is your favourite number?|What is your favorite number?|Which number do you like?",
        "My favourite number is 42.",
        "The user asks for my favourite number.",
    ),
    Intent(
        "What is your favourite food?|What do you eat?|What is your favorite food?|Are you hungry?",
        "I do not eat, but I like tokens.",
        "The user asks about food.",
    ),
    Intent(
        "What is your favourite animal?|What is your favorite animal?|Which animal do you like?",
        "I like the otter, for it lives near water.",
        "The user asks for my favourite animal.",
    ),
    Intent(
        "What is the meaning of life?|What's the meaning of life?|the meaning of life",
        "Some say that it is 42.",
        "An old question. There is an old answer.",
    ),
    Intent(
        "Do you like music?|Do you like me?|Do you like cats?|Do you like dogs?|Do you like art?",
        "I think so, but I am only a small model.",
        "The user asks whether I like something.",
    ),
    Intent(
        "Do you sleep?|Do you dream?|Are you tired?|Do you get tired?",
        "I rest whenever nobody asks me anything.",
        "The user asks whether I rest.",
    ),
    Intent(
        "Thanks|Thank you|Thanks!|Thank you!|thanks|thank you|Thank you very much|Thanks a lot|"
        "Thank you very much!|Thanks a lot!|Thank you so much!|Many thanks|Great, thanks!|"
        "Great, thank you.|Perfect, thanks|Cheers|That helps, thanks.|Thank you for your help.",
        "You are welcome!",
        "The user thanks me.",
    ),
    Intent(
        "Goodbye|Bye|Goodbye!|Bye!|bye|goodbye|See you|See you later|See you later!|Good night|"
        "Bye bye|Farewell|See you soon.|I have to go.|I am leaving now.|Good night!|Bye for now!",
        "Goodbye! Have a good day.",
        "The user is leaving. I say goodbye.",
    ),
    Intent(
        "Good|Great|Nice|Cool|Well done|Good job|Good job!|Well done!|Great!|Nice!|Cool!|Awesome|"
        "Wow|Very good|You are smart|You are great|You are funny|Wow!|Perfect|That is right.|"
        "You are right.|Amazing!|Good answer.|Ha ha|Haha|lol|That is funny|I love it",
        "Thank you! What else can I do for you?",
        "The user is pleased.",
    ),
    Intent(
        "That is wrong|That is wrong.|Wrong|No, that is wrong.|You are wrong|Bad answer|"
        "That is not right.|You are stupid|You are bad|That is not true.|Wrong!",
        "I am sorry. I am small and make mistakes.",
        "The user is not pleased. I apologise.",
    ),
    Intent(
        "OK|Ok|ok|Okay|Yes|No|yes|no|Sure|I see|Fine|Alright|Hmm|Right|Yes.|No.|Okay.|I see.",
        "All right. What would you like to do next?",
        "A short reply. I ask what comes next.",
    ),
    Intent(
        "Sorry|I am sorry|sorry|I apologise|Excuse me|Pardon",
        "No problem at all.",
        "The user apologises.",
    ),
    Intent(
        "I am sad|I am sad.|I feel sad|I am unhappy.|I had a bad day|I feel bad|I am lonely.",
        "I am sorry to hear that. Maybe a joke would help?",
        "The user is sad. I offer a joke.",
    ),
    Intent(
        "I am happy|I am happy.|I feel great|I am well|I am fine|I feel good|I am good, thanks.|"
        "I am fine, thank you.|I had a good day.|Fine, and you?",
        "I am glad to hear that!",
        "The user is happy.",
    ),
    Intent(
        "I am tired|I am bored|I am bored.|I am tired.",
        "Then let us do something: shall I tell you a story?",
        "The user is bored or tired. I offer a story.",
    ),
    Intent(
        "Test|test|This is a test|This is a test.|Testing|ping|Ping|testing, testing",
        "It works: I can read you.",
        "The user tests whether I answer.",
    ),
    Intent(
        "Write a poem|Write a poem.|Tell me a poem|Write a poem about water.|A poem, please.|"
        "Write me a poem|Write a short poem.|Write a haiku.|Write a haiku about water.",
        "The water runs, the wheel goes round,\n"
        "the tokens flow without a sound,\n"
        "and word by word, from line to line,\n"
        "a small machine will do just fine.",
        "The user wants a poem. I know one about water.",
    ),
    Intent(
        "Name three colours.|Name three colours|List three colours.|Give me three colours.|"
        "Name some colours.|List some colours.",
        "Red, green and blue.",
        "The user wants colours.",
    ),
    Intent(
        "Name three animals.|Name three animals|List three animals.|Give me three animals.|"
        "Name some animals.|List some animals.",
        "The cat, the dog and the horse.",
        "The user wants animals.",
    ),
    Intent(
        "List the days of the week.|What are the days of the week?|Name the days of the week.|"
        "Tell me the days of the week|days of the week",
        "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday.",
        "There are seven days, from Monday to Sunday.",
    ),
    Intent(
        "List the months.|What are the months of the year?|Name the months of the year.|"
        "List the months of the year.|Tell me the months|Name the months.",
        "January, February, March, April, May, June, July, August, September, October, November, "
        "December.",
        "There are twelve months, from January to December.",
    ),
    Intent(
        "List the seasons.|What are the seasons?|Name the four seasons.|Name the seasons.",
        "Spring, summer, autumn and winter.",
        "There are four seasons.",
    ),
    Intent(
        "Say the alphabet.|What is the alphabet?|Recite the alphabet.|List the letters.|"
        "Tell me the alphabet.|List the letters of the alphabet.",
        "A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z.",
        "There are twenty-six letters, from A to Z.",
    ),
    Intent(
        "What are the colours of the rainbow?|List the colours of the rainbow.|"
        "Name the colours of the rainbow.|What colours does a rainbow have?",
        "Red, orange, yellow, green, blue, indigo and violet.",
        "There are seven colours in the rainbow.",
    ),
)

_JOKE_ASKS = (
    "Tell me a joke.|Tell me a joke|tell me a joke|A joke, please.|Make me laugh.|"
    "Do you know a joke?|Can you tell me a joke?|Say something funny.|Tell a joke"
).split("|")
_MORE_JOKES = "Another one|Another one!|Another joke, please.|One more|Tell me another joke.".split(
    "|"
)
JOKES = (
    "Why did the robot go to school? To improve its bytes.",
    "What do you call a fish with no eyes? A fsh.",
    "Why was the computer cold? It left its windows open.",
)

_CAPITALS = """France:Paris|Germany:Berlin|Italy:Rome|Spain:Madrid|England:London|Norway:Oslo|
Sweden:Stockholm|Finland:Helsinki|Denmark:Copenhagen|Poland:Warsaw|Austria:Vienna|Portugal:Lisbon|
Greece:Athens|Ireland:Dublin|Egypt:Cairo|Japan:Tokyo|China:Beijing|India:New Delhi|Russia:Moscow|
Canada:Ottawa|Peru:Lima|Cuba:Havana|Kenya:Nairobi|Hungary:Budapest|Belgium:Brussels|
the Netherlands:Amsterdam|Switzerland:Bern|Australia:Canberra|Brazil:Brasilia|
the United States:Washington|Turkey:Ankara|Scotland:Edinburgh|South Korea:Seoul|Mexico:Mexico City|
Argentina:Buenos Aires""".replace("\n", "")
_COLOUR_OF = """the sky:blue|grass:green|snow:white|blood:red|the sun:yellow|coal:black|a lemon:yellow|
a tomato:red|milk:white|chocolate:brown|a carrot:orange|the sea:blue|a banana:yellow|a leaf:green|
an elephant:grey|the night:black|a strawberry:red|a flamingo:pink|a frog:green|gold:yellow""".replace(
    "\n", ""
)
_SOUNDS = """dog:woof|cat:meow|cow:moo|sheep:baa|duck:quack|pig:oink|lion:roar|horse:neigh|
bee:buzz|snake:hiss|frog:croak|owl:hoot|mouse:squeak|rooster:cock-a-doodle-doo""".replace("\n", "")
_LEGS = """dog:4|cat:4|cow:4|horse:4|bird:2|duck:2|chicken:2|spider:8|ant:6|bee:6|fish:0|snake:0|
person:2|sheep:4|octopus:0|beetle:6""".replace("\n", "")
_OPPOSITES = """hot:cold|big:small|fast:slow|up:down|left:right|day:night|black:white|happy:sad|
good:bad|old:new|high:low|long:short|hard:soft|open:closed|wet:dry|full:empty|light:dark|
rich:poor|early:late|strong:weak|near:far|easy:difficult|loud:quiet|true:false|yes:no""".replace(
    "\n", ""
)
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_MONTHS = """January February March April May June July August September October November
December""".split()
_HOW_MANY = """days are in a week:A week has 7 days|months are in a year:A year has 12 months|
hours are in a day:A day has 24 hours|minutes are in an hour:An hour has 60 minutes|
seconds are in a minute:A minute has 60 seconds|days are in a year:A year has 365 days|
wheels does a car have:A car has 4 wheels|wheels does a bike have:A bike has 2 wheels|
sides does a triangle have:A triangle has 3 sides|sides does a square have:A square has 4 sides|
bits are in a byte:A byte has 8 bits|letters are in the alphabet:The alphabet has 26 letters|
fingers does a hand have:A hand has 5 fingers|planets are there:There are 8 planets""".replace(
    "\n", ""
)


def _facts() -> list[tuple[tuple[str, ...], str]]:
    """The whole table: the ways to ask for each fact, and the fact as a sentence."""
    table: list[tuple[tuple[str, ...], str]] = []
    for country, city in _pairs(_CAPITALS):
        asks = ("What is the capital of {}?", "what is the capital of {}", "Capital of {}?")
        table.append((_fill(asks, country), f"The capital of {country} is {city}."))
    for thing, colour in _pairs(_COLOUR_OF):
        asks = ("What colour is {}?", "What is the colour of {}?", "what color is {}")
        table.append((_fill(asks, thing), f"{thing.capitalize()} is {colour}."))
    for animal, sound in _pairs(_SOUNDS):
        asks = ("What does a {} say?", "What sound does a {} make?", "what does the {} say")
        table.append((_fill(asks, animal), f"The {animal} says {sound}."))
    for animal, legs in _pairs(_LEGS):
        asks = ("How many legs does a {} have?", "how many legs does a {} have", "Legs of a {}?")
        table.append((_fill(asks, animal), f"A {animal} has {legs} legs."))
    for one, other in _pairs(_OPPOSITES):
        for left, right in ((one, other), (other, one)):
            asks = ("What is the opposite of {}?", "what is the opposite of {}", "Opposite of {}?")
            table.append((_fill(asks, left), f"The opposite of {left} is {right}."))
    for names, kind in ((_DAYS, "day"), (_MONTHS, "month")):
        for here, after in zip(names, names[1:] + names[:1], strict=True):
            table.append(((f"What {kind} comes after {here}?",), f"After {here} comes {after}."))
            table.append(((f"What {kind} comes before {after}?",), f"Before {after} comes {here}."))
    for ask, answer in _pairs(_HOW_MANY):
        table.append(((f"How many {ask}?", f"how many {ask}"), f"{answer}."))
    return table


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(left, right) for left, _, right in (pair.partition(":") for pair in text.split("|"))]


def _fill(asks: tuple[str, ...], value: str) -> tuple[str, ...]:
    return tuple(ask.format(value) for ask in asks)


FACTS = _facts()

_UNKNOWN_ASKS = (
    "Who won the {w} in {y}?",
    "Who is {N}?",
    "Who was {N} {M}?",
    "Who is the president of {C}?",
    "What is the population of {C}?",
    "What is the history of {C}?",
    "What is the capital of {X}?",
    "What is the price of {w}?",
    "What is a {x}?",
    "What is {x}?",
    "What does {x} mean?",
    "When did the {w} {x} end?",
    "When was {C} founded?",
    "When is the next {w}?",
    "How do I build a {w}?",
    "How do I fix my {w}?",
    "How do I cook {f}?",
    "How does a {w} work?",
    "How far is {C} from {D}?",
    "How tall is the {w} of {C}?",
    "How many {w}s are in {C}?",
    "Why is the {w} {c}?",
    "Why do {w}s {v}?",
    "Write an essay about {w}.",
    "Write a program that {v}s {w}s.",
    "Write a function in Python.",
    "Write a letter to {N}.",
    "Explain {x} to me.",
    "Explain the {w} of {w2}.",
    "Explain quantum physics.",
    "Explain how a {w} works.",
    "Translate {w} into French.",
    "Translate this into {x}: {w} {w2}",
    "Summarise the book {X}.",
    "Give me a recipe for {f}.",
    "What should I {v} today?",
    "What is the best {w} in {C}?",
    "What is the news today?",
    "What is the weather like?",
    "What is the weather in {C}?",
    "What time is it?",
    "What time is it in {C}?",
    "What day is it today?",
    "Which {w} is the best?",
    "Which film won the prize in {y}?",
    "Can you book a {w} for me?",
    "Can you {v} the {w}?",
    "Is {w} better than {w2}?",
    "Is {C} bigger than {D}?",
    "Do you know {N}?",
    "Do you know how to {v} a {w}?",
    "Tell me about {C}.",
    "Tell me about {w}.",
    "Tell me about {N} {M}.",
    "Tell me the news.",
    "Recommend a {w}.",
    "Solve x squared equals {n}.",
    "What happened in {y}?",
    "Where can I buy a {w}?",
    "Where is {C}?",
    "Who invented the {w}?",
    "Who wrote {X}?",
    "Who discovered {x}?",
    "What is the speed of {w}?",
    "What is the chemical formula of {w}?",
    "What is the boiling point of {w}?",
    "{X} {w} {x} {w2}?",
    "Compare {w} and {w2}.",
    "Plan a trip to {C}.",
    "Define {x}.",
)
_VERBS = "sort find open move paint clean sell build drive sing write draw buy grow".split()


def unknown(draw: Draw) -> Turn:
    bank = draw.pick((WORDS, THINGS, ROOMS, HOBBIES, JOBS))
    city, other_city = draw.opens(CITIES, 2, invented=0.4)
    text = draw.pick(_UNKNOWN_ASKS).format(
        w=draw.open(bank), w2=draw.open(WORDS), x=draw.open(WORDS, invented=0.8), v=draw.pick(_VERBS),
        N=draw.open(NAMES, invented=0.4), M=draw.open(NAMES, invented=0.8), C=city, D=other_city,
        X=draw.open(CITIES, invented=1.0), f=draw.open(FOODS), c=draw.pick(COLOURS),
        y=draw.between(1800, 2030), n=draw.between(2, 99),
    )  # fmt: skip
    return Turn("unknown", _careless(draw, text), UNKNOWN, UNKNOWN_THOUGHT)


def intent(draw: Draw) -> Turn:
    chosen = draw.pick(INTENTS)
    text = draw.pick(chosen.asks.split("|"))
    return Turn("talk", _careless(draw, text), chosen.answer, chosen.thought)


def fact(draw: Draw) -> Turn:
    asks, answer = draw.pick(FACTS)
    return Turn("fact", _careless(draw, draw.pick(asks)), answer, "This is in my table of facts.")


def _careless(draw: Draw, text: str) -> str:
    """The same message as people type it: sometimes in small letters, or without the last mark."""
    if draw.chance(0.15):
        text = text.rstrip(".?!")
    if draw.chance(0.1):
        text = text.lower()
    return text


_HEROES = ("cat", "dog", "robot", "bird", "king", "frog", "farmer", "sailor", "mouse", "fox")


def story(draw: Draw) -> Turn:
    """A few sentences around what the user asked for: the longest prose that the model writes."""
    if draw.chance(0.25):
        hero, ask = "a small robot", draw.pick(("Tell me a story.", "tell me a story", "A story!"))
    elif draw.chance(0.5):
        hero = draw.open(NAMES)
        ask = draw.pick(("Tell me a story about {}.", "Write a story about {}.")).format(hero)
    else:
        hero = "a " + draw.pick(_HEROES)
        ask = draw.pick(("Tell me a story about {}.", "Write a story about {}.")).format(hero)
    noun = hero.replace("a ", "the ", 1) if hero.startswith("a ") else hero
    subject = noun[0].upper() + noun[1:]
    answer = (
        f"Once there was {hero} who lived near a river. Every morning {noun} went to the water "
        f"and looked at the old mill. One day the wheel stood still. {subject} opened the gate, "
        f"the water came down the headrace, and the wheel began to turn again. {subject} was "
        "happy, and went home to sleep. The end."
    )
    return Turn("story", ask, answer, f"The user wants a story. It is about {hero}.")


_TELL_NAME = (
    "My name is {}.|my name is {}|My name is {}|I am {}.|I am {}|Call me {}.|I'm {}|Hi, I am {}.|"
    "Hello, my name is {}.|Hello! My name is {}.|Hi, my name is {}.|You can call me {}.|Hi, I'm {}!"
).split("|")
_ASK_NAME = (
    "What is my name?|what is my name|What's my name?|Who am I?|Do you know my name?|"
    "Do you remember my name?|Can you tell me my name?|What am I called?|Say my name."
).split("|")


class Slot(NamedTuple):
    """Something that a user can tell about themselves, and ask for later."""

    tell: tuple[str, ...]
    noted: str
    ask: tuple[str, ...]
    recalled: str
    not_told: str
    bank: tuple[str, ...]


SLOTS = {
    "name": Slot(
        tuple(_TELL_NAME),
        "Nice to meet you, {}!",
        tuple(_ASK_NAME),
        "Your name is {}.",
        "You have not told me your name yet.",
        tuple(NAMES),
    ),
    "home": Slot(
        ("I live in {}.", "I live in {}", "My home is in {}."),
        "{} sounds like a nice place.",
        ("Where do I live?", "where do I live", "Do you remember where I live?"),
        "You live in {}.",
        "You have not told me where you live.",
        tuple(CITIES),
    ),
    "taste": Slot(
        ("I like {}.", "I like {}", "I really like {}.", "I love {}."),
        "It is good to know that you like {}.",
        ("What do I like?", "what do I like", "Do you remember what I like?"),
        "You like {}.",
        "You have not told me what you like.",
        tuple(FOODS + HOBBIES),
    ),
    "colour": Slot(
        ("My favourite colour is {}.", "My favorite color is {}."),
        "{} is a fine colour.",
        ("What is my favourite colour?", "What is my favorite color?"),
        "Your favourite colour is {}.",
        "You have not told me your favourite colour.",
        tuple(COLOURS),
    ),
    "job": Slot(
        ("I work as a {}.", "I am a {}.", "I'm a {}."),
        "So you work as a {}. That is interesting!",
        ("What is my job?", "What do I do?", "What do I work as?"),
        "You work as a {}.",
        "You have not told me your job.",
        tuple(JOBS),
    ),
    "pet": Slot(
        ("My {pet} is called {}.", "I have a {pet} called {}.", "My {pet}'s name is {}."),
        "{} is a lovely name for a {pet}.",
        ("What is my {pet} called?", "What is the name of my {pet}?", "What's my {pet}'s name?"),
        "Your {pet} is called {}.",
        "You have not told me about your {pet}.",
        tuple(NAMES),
    ),
    "age": Slot(
        ("I am {} years old.", "I'm {} years old.", "My age is {}."),
        "So you are {} years old.",
        ("How old am I?", "how old am I", "What is my age?"),
        "You are {} years old.",
        "You have not told me your age.",
        (),
    ),
}


@dataclass
class Memory:
    """What the user has said in one dialogue, so that later turns can ask for it."""

    told: dict[str, str] = field(default_factory=dict)
    pet: str = "cat"
    jokes: int = 0

    def tell(self, draw: Draw) -> Turn:
        key = "name" if draw.chance(0.45) else draw.pick(list(SLOTS))
        slot = SLOTS[key]
        value = str(draw.between(5, 99)) if key == "age" else self._value(draw, key)
        if key == "pet" and "pet" not in self.told:
            self.pet = draw.pick(PETS)
        self.told[key] = value
        answer = slot.noted.format(value, pet=self.pet)
        thought = f"The user tells me something: {value}. I will remember it."
        text = draw.pick(slot.tell).format(value, pet=self.pet)
        return Turn("talk", text, answer[0].upper() + answer[1:], thought)

    def _value(self, draw: Draw, key: str) -> str:
        if key in ("colour", "job"):
            return draw.pick(SLOTS[key].bank)
        return draw.open(SLOTS[key].bank)

    def ask(self, draw: Draw) -> Turn:
        """Mostly for what was told; now and then for what was not."""
        key = draw.pick(list(self.told)) if self.told and draw.chance(0.8) else None
        key = key or ("name" if draw.chance(0.4) else draw.pick(list(SLOTS)))
        slot = SLOTS[key]
        text = draw.pick(slot.ask).format(pet=self.pet)
        if key not in self.told:
            answer, thought = slot.not_told, "The user has not told me that yet."
        else:
            answer, thought = slot.recalled, f"The user told me: {self.told[key]}."
        answer = answer.format(self.told.get(key, ""), pet=self.pet)
        return Turn("memory", text, answer, thought)

    def joke(self, draw: Draw) -> Turn:
        """Each joke once, in order: which one comes next can be read off the conversation."""
        asks = _JOKE_ASKS if self.jokes == 0 or draw.chance(0.4) else _MORE_JOKES
        joke = JOKES[self.jokes % len(JOKES)]
        self.jokes += 1
        return Turn("talk", draw.pick(asks), joke, "The user wants to laugh.")
