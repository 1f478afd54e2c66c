// Asks a router for everything that the official clients have a method for, as `support/every_endpoint.py`
// does, and prints what came as JSON: `facts` by question, and the requests `seen`.
//
//   node every_endpoint.js URL FOLDER      FOLDER has the clients in its `node_modules`
"use strict";

const { createRequire } = require("node:module");
const [url, folder] = process.argv.slice(2);
const clients = createRequire(`${folder}/`);
const OpenAI = clients("openai");
const Anthropic = clients("@anthropic-ai/sdk");

const seen = [];
async function recordingFetch(target, init) {
  const reply = await fetch(target, init);
  seen.push([init.method.toLowerCase(), new URL(target).pathname, reply.status]);
  return reply;
}

const options = { apiKey: "unused", maxRetries: 0, fetch: recordingFetch };
const openai = new OpenAI({ baseURL: `${url}/v1`, ...options });
const anthropic = new Anthropic({ baseURL: url, ...options });

const PROMPT = "Which of these words is the shortest one, and which is the longest?";
const messages = [{ role: "user", content: PROMPT }];
const greedy = { model: "sim", temperature: 0 };
const parameters = { type: "object", properties: { city: { type: "string" } } };
const recording = () =>
  OpenAI.toFile(Buffer.from(Array.from({ length: 70000 }, (_, i) => i % 256)), "speech.wav");

// The answer to the second of two equal questions, of whose prompt a part is cached.
async function again(ask) {
  await ask();
  return ask();
}

async function all(stream) {
  const events = [];
  for await (const event of stream) events.push(event);
  return events;
}

const usage = (told) => ({
  prompt: told.prompt_tokens,
  completion: told.completion_tokens,
  cached: told.prompt_tokens_details.cached_tokens,
});
const usageOfResponse = (told) => ({
  prompt: told.input_tokens,
  completion: told.output_tokens,
  cached: told.input_tokens_details.cached_tokens,
});
const usageOfMessage = (told) => ({
  prompt: told.input_tokens,
  completion: told.output_tokens,
  cached: told.cache_read_input_tokens,
});
const joined = (texts) => texts.filter((text) => text).join("");

async function missing(ask) {
  try {
    await ask();
    return null;
  } catch (error) {
    if (!(error instanceof OpenAI.NotFoundError)) throw error;
    return error.status;
  }
}

const chat = (more) =>
  openai.chat.completions.create({ ...greedy, messages, max_completion_tokens: 8, ...more });
const complete = (more) =>
  openai.completions.create({ ...greedy, prompt: PROMPT, max_tokens: 8, ...more });
const respond = (more) =>
  openai.responses.create({ ...greedy, input: PROMPT, max_output_tokens: 8, store: false, ...more });
const message = { ...greedy, messages, max_tokens: 8 };
const streamed = { stream: true, stream_options: { include_usage: true } };

const questions = {
  models: async () => (await openai.models.list()).data.map((model) => model.id).sort(),
  model: async () => (await openai.models.retrieve("sim")).id,
  "no model": () => missing(() => openai.models.retrieve("nobody")),
  chat: async () => {
    const reply = await again(chat);
    const [choice] = reply.choices;
    return { text: choice.message.content, end: choice.finish_reason, usage: usage(reply.usage) };
  },
  "chat stream": async () => {
    const chunks = await again(async () => all(await chat(streamed)));
    const choices = chunks.flatMap((chunk) => chunk.choices);
    return {
      text: joined(choices.map((choice) => choice.delta.content)),
      end: choices.at(-1).finish_reason,
      usage: usage(chunks.at(-1).usage),
    };
  },
  "chat with tools": async () => {
    const tools = [{ type: "function", function: { name: "weather", parameters } }];
    const reply = await again(() => chat({ tools, tool_choice: "auto" }));
    return { text: reply.choices[0].message.content, usage: usage(reply.usage) };
  },
  "chat with samples": async () => {
    const reply = await again(() => chat({ n: 2 }));
    const texts = reply.choices.map((choice) => choice.message.content);
    return { texts, usage: usage(reply.usage) };
  },
  completion: async () => {
    const reply = await again(complete);
    return { text: reply.choices[0].text, usage: usage(reply.usage) };
  },
  "completion stream": async () => {
    const chunks = await again(async () => all(await complete(streamed)));
    const choices = chunks.flatMap((chunk) => chunk.choices);
    return { text: joined(choices.map((choice) => choice.text)), usage: usage(chunks.at(-1).usage) };
  },
  response: async () => {
    const reply = await again(respond);
    return { text: reply.output_text, status: reply.status, usage: usageOfResponse(reply.usage) };
  },
  "response stream": async () => {
    const events = await again(async () => all(await respond({ stream: true })));
    const deltas = events.filter((event) => event.type === "response.output_text.delta");
    const last = events.at(-1);
    return {
      text: joined(deltas.map((event) => event.delta)),
      end: last.type,
      usage: usageOfResponse(last.response.usage),
    };
  },
  "stored response": () => missing(() => openai.responses.retrieve("resp_1")),
  "deleted response": () => missing(() => openai.responses.delete("resp_1")),
  embeddings: async () => {
    // The client asks for base64, and decodes it.
    const reply = await openai.embeddings.create({ model: "sim-embed", input: ["a", "bc"] });
    const vectors = reply.data.map((entry) => Array.from(entry.embedding));
    return { vectors, prompt: reply.usage.prompt_tokens };
  },
  transcription: async () => {
    const reply = await openai.audio.transcriptions.create({
      file: await recording(), model: "sim", language: "en", timestamp_granularities: ["word"],
    });
    return { text: reply.text, usage: reply.usage };
  },
  "transcription stream": async () => {
    const stream = openai.audio.transcriptions.create({
      file: await recording(), model: "sim", stream: true,
    });
    const choices = (await all(await stream)).flatMap((event) => event.choices);
    return joined(choices.map((choice) => choice.delta.content));
  },
  translation: async () => {
    const file = await recording();
    return (await openai.audio.translations.create({ file, model: "sim" })).text;
  },
  message: async () => {
    const reply = await again(() => anthropic.messages.create(message));
    const text = reply.content[0].text;
    return { text, end: reply.stop_reason, usage: usageOfMessage(reply.usage) };
  },
  "message stream": async () => {
    const reply = await again(() => anthropic.messages.stream(message).finalMessage());
    const text = reply.content[0].text;
    return { text, end: reply.stop_reason, usage: usageOfMessage(reply.usage) };
  },
  "count of tokens": async () =>
    (await anthropic.messages.countTokens({ model: "sim", messages })).input_tokens,
  "models of Anthropic": async () =>
    (await all(anthropic.models.list())).map((model) => model.id).sort(),
  "model of Anthropic": async () => (await anthropic.models.retrieve("sim")).id,
};

(async () => {
  const facts = {};
  for (const [name, ask] of Object.entries(questions)) facts[name] = await ask();
  console.log(JSON.stringify({ facts, seen }));
})();
