# ruff: noqa: SIM905 - lists of words are easier to read, and to add to, as text
"""Calling a tool from the tools list, and telling the user what the tool said.

Two sources of tools. The familiar ones (weather, alarms, music) come under several names, so that
the description decides and not the name. The invented ones are a verb and a noun that the user's
sentence repeats: they teach that a tool never seen before is chosen by matching words.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from demo_model.turns import Call, Turn
from demo_model.words import CITIES, FOODS, HOBBIES, NAMES, ROOMS, THINGS, WORDS, Draw

NO_TOOL = "I have no tool for that."

Tool = dict[str, Any]


class Kind(NamedTuple):
    """A familiar tool; each parameter is `name|other name: type: bank`."""

    names: str
    says: str
    parameters: tuple[str, ...]
    asks: str
    results: tuple[str, ...]


_BANKS = {
    "city": CITIES,
    "name": NAMES,
    "room": ROOMS,
    "thing": THINGS,
    "food": FOODS,
    "hobby": HOBBIES,
    "word": WORDS,
}
_RANGES = {
    "small": (2, 20),
    "number": (0, 99),
    "hour": (1, 23),
    "minutes": (1, 90),
    "id": (10, 9999),
}

KINDS = (
    Kind(
        "get_weather|weather|current_weather|weather_lookup|fetch_weather|get_current_weather",
        "Get the weather in a city.",
        ("city|location|place|town: string: city",),
        "What is the weather in {0}?|what is the weather in {0}|How is the weather in {0}?|"
        "Is it raining in {0}?|Weather in {0}?|What's the weather like in {0}?|"
        "Tell me the weather in {0}.|What is the weather like in {0} today?",
        ('{{"temperature": {n}, "sky": "{sky}"}}', "{sky}, {n} degrees"),
    ),
    Kind(
        "get_time|current_time|time_in_city|clock|get_local_time",
        "Get the time in a city.",
        ("city|location|place|zone: string: city",),
        "What time is it in {0}?|what time is it in {0}|Tell me the time in {0}.|Time in {0}?",
        ('{{"time": "{n}:{m}"}}', "{n}:{m}"),
    ),
    Kind(
        "set_alarm|alarm|create_alarm|wake_me",
        "Set an alarm for an hour of the day.",
        ("hour|time|at: integer: hour",),
        "Set an alarm for {0}.|Wake me at {0}.|Please set an alarm for {0}|I need an alarm at {0}.",
        ('{{"status": "set"}}', "alarm set"),
    ),
    Kind(
        "start_timer|timer|set_timer|countdown",
        "Start a timer for some minutes.",
        ("minutes|duration|length: integer: minutes",),
        "Start a timer for {0} minutes.|Set a timer for {0} minutes.|Timer for {0} minutes please",
        ('{{"status": "started"}}', "timer started"),
    ),
    Kind(
        "play_music|play_song|music_player|play",
        "Play music of some kind.",
        ("genre|style|query|music: string: hobby",),
        "Play some {0} music.|Play {0} music.|I want to hear {0} music.|Put on some {0} music.",
        ('{{"status": "playing"}}', "now playing"),
    ),
    Kind(
        "turn_on_light|light_on|switch_on_light|lights",
        "Turn on the light in a room.",
        ("room|location|where: string: room",),
        "Turn on the light in the {0}.|Switch on the light in the {0}.|Light in the {0}, please.|"
        "It is dark in the {0}, turn on the light.",
        ('{{"light": "on"}}', "the light is on"),
    ),
    Kind(
        "set_temperature|set_heating|thermostat|heat_room",
        "Set the temperature of a room.",
        ("room|location|where: string: room", "degrees|temperature|value: integer: small"),
        "Set the temperature in the {0} to {1} degrees.|Heat the {0} to {1} degrees.|"
        "Make the {0} {1} degrees warm.",
        ('{{"status": "ok"}}', '{{"status": "heating", "minutes": {n}}}'),
    ),
    Kind(
        "order_food|order|buy_food|food_order",
        "Order some food.",
        ("item|food|product|dish: string: food", "count|quantity|amount: integer: small"),
        "Order {1} {0}.|I want to order {1} {0}.|Please order {1} {0}.|Buy {1} {0}.",
        ('{{"order": {id}, "price": {n}}}', "order {id} is on its way"),
    ),
    Kind(
        "call_person|make_call|phone|dial",
        "Call somebody on the phone.",
        ("name|person|contact: string: name",),
        "Call {0}.|Please call {0}.|Phone {0}.|I want to call {0}.|Give {0} a call.",
        ('{{"status": "ringing"}}', "no answer"),
    ),
    Kind(
        "send_message|message|send_text|text_person",
        "Send a message to somebody.",
        ("to|recipient|name|contact: string: name", "text|message|body: string: text"),
        "Send {0} a message: {1}|Text {0}: {1}|Message {0}: {1}|Tell {0} this: {1}|"
        "Send a message to {0}: {1}",
        ('{{"status": "sent"}}', "message sent"),
    ),
    Kind(
        "find_person|lookup_user|get_user|user_info",
        "Find a user by their number.",
        ("id|user_id|number: integer: id",),
        "Who is user {0}?|Find user {0}.|Look up user {0}.|Show me user {0}.",
        ('{{"name": "{name}", "age": {n}}}', '{{"name": "{name}", "city": "{city}"}}'),
    ),
    Kind(
        "search|web_search|search_web|find_online",
        "Search the web.",
        ("query|q|text|terms: string: text",),
        "Search the web for {0}|Search for {0}|Look up {0} on the web|Find {0} on the web|"
        "Google {0}",
        ('{{"hits": {id}}}', "{id} pages found"),
    ),
    Kind(
        "multiply|product|multiply_numbers|times",
        "Multiply two numbers.",
        ("a|x|first|left: integer: number", "b|y|second|right: integer: number"),
        "What is {0} times {1}?|Multiply {0} by {1}.|What is {0} * {1}?|{0} * {1}|"
        "How much is {0} times {1}?",
        ("{id}", '{{"result": {id}}}'),
    ),
    Kind(
        "add|add_numbers|calculator_add|sum_of",
        "Add two numbers.",
        ("a|x|first|left: integer: number", "b|y|second|right: integer: number"),
        "What is {0} + {1}?|Add {0} and {1}.|{0} + {1}|What is {0} plus {1}?",
        ("{id}", '{{"result": {id}}}'),
    ),
    Kind(
        "book_table|reserve_table|restaurant|reserve",
        "Book a table in a restaurant.",
        ("city|place|location: string: city", "people|guests|seats: integer: small"),
        "Book a table for {1} people in {0}.|I need a table for {1} people in {0}.|"
        "Reserve a table in {0} for {1} people.",
        ('{{"status": "booked", "hour": {h}}}', "booked for {h}:00"),
    ),
    Kind(
        "find_train|trains|train_times|next_train",
        "Find a train between two cities.",
        ("from|origin|start: string: city", "to|destination|end: string: city"),
        "Find a train from {0} to {1}.|When is the next train from {0} to {1}?|"
        "I want to travel from {0} to {1}.|Trains from {0} to {1}?",
        ('{{"leaves": "{h}:{m}", "price": {n}}}', "the next train leaves at {h}:{m}"),
    ),
    Kind(
        "roll_dice|dice|throw_dice|roll",
        "Roll a die.",
        ("sides|faces|size: integer: small",),
        "Roll a die with {0} sides.|Roll a {0} sided die.|Throw a die with {0} sides.",
        ('{{"value": {h}}}', "{h}"),
    ),
    Kind(
        "get_price|price|stock_price|price_of",
        "Get the price of a thing.",
        ("item|product|thing|name: string: thing",),
        "What is the price of a {0}?|How much does a {0} cost?|Price of a {0}?|"
        "What does a {0} cost?",
        ('{{"price": {n}}}', "{n} coins"),
    ),
)

_SKIES = ("sunny", "cloudy", "rainy", "windy", "clear", "snowy", "foggy")
_INVENTED_VERBS = "get find set check open show read start stop count clean move".split()
_DESCRIBE = {
    "city": "The city",
    "name": "The name",
    "room": "The room",
    "thing": "The thing",
    "food": "The food",
    "hobby": "The kind",
    "word": "The word",
    "text": "The text",
    "small": "How many",
    "number": "A number",
    "hour": "The hour",
    "minutes": "How many minutes",
    "id": "The number",
}


class Offer(NamedTuple):
    """A tool as it is offered in one dialogue, and how to make a user ask for it."""

    kind: Kind
    name: str
    schema: Tool
    keys: tuple[str, ...]
    banks: tuple[str, ...]


def offers(draw: Draw, count: int) -> list[Offer]:
    """`count` tools of different kinds and names."""
    kinds = draw.some(KINDS, count)
    found: list[Offer] = []
    for kind in kinds:
        offer = _offer(draw, _invent_kind(draw) if draw.chance(0.4) else kind)
        if all(offer.name != other.name for other in found):
            found.append(offer)
    return found


def _invent_kind(draw: Draw) -> Kind:
    verb, noun = draw.pick(_INVENTED_VERBS), draw.open(draw.pick((WORDS, THINGS)), invented=0.5)
    key = draw.pick(("item", "object", "target", "room", "name", "key", "label"))
    bank = draw.pick(("thing", "room", "word", "name", "city"))
    says = f"{verb.capitalize()} the {noun} of a {key}."
    if draw.chance(0.3):
        parameters: tuple[str, ...] = (
            f"{key}: string: {bank}",
            f"{draw.pick(('value', 'level', 'number'))}: integer: number",
        )
        asks = (
            f"{verb.capitalize()} the {noun} of {{0}} to {{1}}.|{verb} the {noun} of {{0}} to {{1}}"
        )
    else:
        parameters = (f"{key}: string: {bank}",)
        asks = (
            f"{verb.capitalize()} the {noun} of {{0}}.|Please {verb} the {noun} of {{0}}.|"
            f"{verb} the {noun} of {{0}}|Can you {verb} the {noun} of {{0}}?"
        )
    name = draw.pick((f"{verb}_{noun}", f"{noun}_{verb}", f"{verb}_{noun}_of_{key}"))
    results = (f'{{{{"{noun}": {{n}}}}}}', '{{"status": "ok"}}', "{n}")
    return Kind(name.lower(), says, parameters, asks, results)


def _offer(draw: Draw, kind: Kind) -> Offer:
    name = draw.pick(kind.names.split("|"))
    keys: list[str] = []
    banks: list[str] = []
    properties: dict[str, dict[str, str]] = {}
    described = draw.chance(0.6)
    for parameter in kind.parameters:
        names, kind_of, bank = (part.strip() for part in parameter.split(":"))
        key = draw.pick([name for name in names.split("|") if name not in keys])
        keys.append(key)
        banks.append(bank)
        properties[key] = {"type": kind_of}
        if described:
            properties[key]["description"] = _DESCRIBE[bank] + draw.pick(("", ".", "."))
    return Offer(kind, name, _schema(draw, name, kind.says, properties), tuple(keys), tuple(banks))


def _schema(draw: Draw, name: str, says: str, properties: dict[str, Any]) -> Tool:
    """The tool as clients send it; clients differ in the keys that they add and in their order."""
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if draw.chance(0.85):
        parameters["required"] = list(properties)
    if draw.chance(0.1):
        parameters["additionalProperties"] = False
    says = says.rstrip(".") if draw.chance(0.2) else says
    function: dict[str, Any] = {"name": name, "description": says, "parameters": parameters}
    if draw.chance(0.05):
        function = {"description": says, "name": name, "parameters": parameters}
    return {"type": "function", "function": function}


def call(draw: Draw, offer: Offer) -> Turn:
    """A request that one of the offered tools answers; now and then for two things at once."""
    values = [_value(draw, bank) for bank in offer.banks]
    ask = draw.pick(offer.kind.asks.split("|")).format(*values)
    if len(values) == 1 and offer.banks[0] in ("city", "room", "thing") and draw.chance(0.12):
        return _two_calls(draw, offer, ask, str(values[0]))
    made = _make(draw, offer, values)
    thought = f"The tool {offer.name} can do this. {_spell_out(made)}"
    return Turn(
        "tool", ask, report(made.result), "The tool has answered. I report it.", (made,), thought
    )


def _two_calls(draw: Draw, offer: Offer, ask: str, first: str) -> Turn:
    second = _value(draw, offer.banks[0])
    while second == first:
        second = _value(draw, offer.banks[0])
    made = (_make(draw, offer, [first]), _make(draw, offer, [second]))
    answer = " ".join(report(each.result) for each in made)
    thought = f"The tool {offer.name} can do this, in two calls. {' '.join(map(_spell_out, made))}"
    ask = ask.replace(first, f"{first} and {second}", 1)
    return Turn("tool", ask, answer, "The tools have answered. I report it.", made, thought)


def _make(draw: Draw, offer: Offer, values: list[str | int]) -> Call:
    if draw.chance(0.06):
        result = json.dumps({"error": draw.pick(("not found", "no connection", "not allowed"))})
    else:
        result = draw.pick(offer.kind.results).format(
            n=draw.between(2, 99), m=draw.between(10, 59), h=draw.between(1, 23),
            id=draw.between(100, 9999), sky=draw.pick(_SKIES), name=draw.open(NAMES),
            city=draw.open(CITIES),
        )  # fmt: skip
    return Call(offer.name, dict(zip(offer.keys, values, strict=True)), result)


def _spell_out(made: Call) -> str:
    return " ".join(f"The {key} is {value}." for key, value in made.arguments.items())


def _value(draw: Draw, bank: str) -> str | int:
    if bank in _RANGES:
        return draw.between(*_RANGES[bank])
    if bank == "text":
        return " ".join(
            draw.open(draw.pick((WORDS, THINGS, FOODS))) for _ in range(draw.between(1, 4))
        )
    return draw.open(_BANKS[bank])


def report(result: str) -> str:
    """What to say about a tool's result: one rule for all tools, so that it carries to new ones."""
    try:
        value = json.loads(result)
    except ValueError:
        return f"Here is what I found: {result}."
    if not isinstance(value, dict):
        return f"The result is {result}."
    if "error" in value:
        return f"The tool failed: {value['error']}."
    parts = [f"the {key} is {said}" for key, said in value.items()]
    text = " and ".join(parts)
    return text[0].upper() + text[1:] + "."


def without_tool(draw: Draw, offered: list[Offer]) -> Turn:
    """A request for a tool that is not on the list."""
    names = {name for offer in offered for name in offer.kind.names.split("|")}
    kinds = [
        kind
        for kind in KINDS
        if names.isdisjoint(kind.names.split("|")) and "add" not in kind.names.split("|")
    ]
    offer = _offer(draw, draw.pick(kinds))
    asked = call(draw, offer)
    thought = "None of my tools can do this."
    return Turn("no tool", asked.user, NO_TOOL, thought)
