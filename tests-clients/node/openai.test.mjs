// The `openai` package for Node against the server at HEADRACE_URL.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";

const model = process.env.HEADRACE_MODEL ?? "headrace-demo";
const client = new OpenAI({ baseURL: `${process.env.HEADRACE_URL}/v1`, apiKey: "none", maxRetries: 0 });
const sum = [{ role: "user", content: "What is 5 + 6?" }];
const weather = {
  type: "function",
  function: {
    name: "get_weather",
    parameters: {
      type: "object",
      properties: { city: { type: "string", maxLength: 20 } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};

test("chat, whole and streamed", async () => {
  const whole = await client.chat.completions.create({ model, messages: sum, temperature: 0 });
  assert.match(whole.choices[0].message.content, /11/);
  const stream = await client.chat.completions.create({ model, messages: sum, temperature: 0, stream: true });
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
  assert.equal(text, whole.choices[0].message.content);
});

test("forced calls", async () => {
  const answer = await client.chat.completions.create({
    model,
    messages: [{ role: "user", content: "What is the weather in Oslo?" }],
    tools: [weather],
    tool_choice: "required",
    parallel_tool_calls: false,
    max_completion_tokens: 200,
  });
  const [call] = answer.choices[0].message.tool_calls;
  assert.equal(call.function.name, "get_weather");
  assert.equal(typeof JSON.parse(call.function.arguments).city, "string");
});

test("responses, streamed", async () => {
  const events = await client.responses.create({ model, input: "What is 5 + 6?", temperature: 0, stream: true });
  const kinds = [];
  for await (const event of events) kinds.push(event.type);
  assert.equal(kinds[0], "response.created");
  assert.equal(kinds.at(-1), "response.completed");
});

test("an unknown model", async () => {
  await assert.rejects(client.chat.completions.create({ model: "nothing", messages: sum }), OpenAI.NotFoundError);
});
