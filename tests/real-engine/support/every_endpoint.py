"""Asks a router for everything that the official clients have a method for.

`javascript/every_endpoint.js` asks the same with the clients for JavaScript.
"""

import json
import pathlib
import subprocess

import anthropic
import httpx
import openai

SCRIPT = pathlib.Path(__file__).parents[1] / "javascript" / "every_endpoint.js"
PROMPT = "Which of these words is the shortest one, and which is the longest?"
MESSAGES = [{"role": "user", "content": PROMPT}]
GREEDY = {"model": "sim", "temperature": 0}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
RECORDING = ("speech.wav", bytes(i % 256 for i in range(70000)))


def of_javascript(url, folder):
    """What the clients for JavaScript got (`facts`), and the requests that they sent (`seen`)."""
    command = ["node", SCRIPT, url, folder]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout)


def of_python(url):
    """The same of the clients for Python."""
    seen = []

    def record(response):
        request = response.request
        seen.append([request.method.lower(), request.url.path, response.status_code])

    clients = {}
    for library, base_url in ((openai, f"{url}/v1"), (anthropic, url)):
        http_client = library.DefaultHttpxClient(event_hooks={"response": [record]})
        make = library.OpenAI if library is openai else library.Anthropic
        clients[library] = make(
            base_url=base_url, api_key="unused", max_retries=0, http_client=http_client
        )
    questions = {**of_openai(clients[openai]), **of_anthropic(clients[anthropic])}
    facts = {name: ask() for name, ask in questions.items()}
    return {"facts": json.loads(json.dumps(facts)), "seen": seen}


def again(ask):
    """The answer to the second of two equal questions, of whose prompt a part is cached."""
    ask()
    return ask()


def usage(told):
    cached = told.prompt_tokens_details.cached_tokens
    return counts(told.prompt_tokens, told.completion_tokens, cached)


def usage_of_response(told):
    cached = told.input_tokens_details.cached_tokens
    return counts(told.input_tokens, told.output_tokens, cached)


def usage_of_message(told):
    return counts(told.input_tokens, told.output_tokens, told.cache_read_input_tokens)


def counts(prompt, completion, cached):
    return {"prompt": prompt, "completion": completion, "cached": cached}


def joined(texts):
    return "".join(text for text in texts if text)


def missing(ask):
    try:
        ask()
    except openai.NotFoundError as error:
        return error.status_code


def of_openai(client):
    def chat(**more):
        create = client.chat.completions.create
        return create(messages=MESSAGES, max_completion_tokens=8, **GREEDY, **more)

    def complete(**more):
        return client.completions.create(prompt=PROMPT, max_tokens=8, **GREEDY, **more)

    def respond(**more):
        create = client.responses.create
        return create(input=PROMPT, max_output_tokens=8, store=False, **GREEDY, **more)

    def whole_chat():
        reply = again(chat)
        choice = reply.choices[0]
        text, end = choice.message.content, choice.finish_reason
        return {"text": text, "end": end, "usage": usage(reply.usage)}

    def streamed_chat():
        chunks = again(lambda: list(chat(**STREAMED)))
        choices = [choice for chunk in chunks for choice in chunk.choices]
        text = joined(choice.delta.content for choice in choices)
        end = choices[-1].finish_reason
        return {"text": text, "end": end, "usage": usage(chunks[-1].usage)}

    def chat_with_tools():
        tools = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
        reply = again(lambda: chat(tools=tools, tool_choice="auto"))
        return {"text": reply.choices[0].message.content, "usage": usage(reply.usage)}

    def chat_with_samples():
        reply = again(lambda: chat(n=2))
        texts = [choice.message.content for choice in reply.choices]
        return {"texts": texts, "usage": usage(reply.usage)}

    def whole_completion():
        reply = again(complete)
        return {"text": reply.choices[0].text, "usage": usage(reply.usage)}

    def streamed_completion():
        chunks = again(lambda: list(complete(**STREAMED)))
        text = joined(choice.text for chunk in chunks for choice in chunk.choices)
        return {"text": text, "usage": usage(chunks[-1].usage)}

    def whole_response():
        reply = again(respond)
        text, status = reply.output_text, reply.status
        return {"text": text, "status": status, "usage": usage_of_response(reply.usage)}

    def streamed_response():
        events = again(lambda: list(respond(stream=True)))
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        text, last = joined(event.delta for event in deltas), events[-1]
        return {"text": text, "end": last.type, "usage": usage_of_response(last.response.usage)}

    def embeddings():
        # The client asks for base64, and decodes it.
        reply = client.embeddings.create(model="sim-embed", input=["a", "bc"])
        vectors = [list(entry.embedding) for entry in reply.data]
        return {"vectors": vectors, "prompt": reply.usage.prompt_tokens}

    def transcription():
        reply = client.audio.transcriptions.create(
            file=RECORDING, model="sim", language="en", timestamp_granularities=["word"]
        )
        return {"text": reply.text, "usage": reply.usage.to_dict()}

    def streamed_transcription():
        create = client.audio.transcriptions.create
        events = [event.to_dict() for event in create(file=RECORDING, model="sim", stream=True)]
        choices = [choice for event in events for choice in event["choices"]]
        return joined(choice["delta"]["content"] for choice in choices)

    def translation():
        return client.audio.translations.create(file=RECORDING, model="sim").text

    return {
        "models": lambda: sorted(model.id for model in client.models.list()),
        "model": lambda: client.models.retrieve("sim").id,
        "no model": lambda: missing(lambda: client.models.retrieve("nobody")),
        "chat": whole_chat,
        "chat stream": streamed_chat,
        "chat with tools": chat_with_tools,
        "chat with samples": chat_with_samples,
        "completion": whole_completion,
        "completion stream": streamed_completion,
        "response": whole_response,
        "response stream": streamed_response,
        "stored response": lambda: missing(lambda: client.responses.retrieve("resp_1")),
        "deleted response": lambda: missing(lambda: client.responses.delete("resp_1")),
        "embeddings": embeddings,
        "transcription": transcription,
        "transcription stream": streamed_transcription,
        "translation": translation,
    }


def of_anthropic(client):
    # The method has no parameter for the temperature any more.
    body = {"temperature": 0}
    message = {"model": "sim", "messages": MESSAGES, "max_tokens": 8, "extra_body": body}

    def facts(reply):
        text, end = reply.content[0].text, reply.stop_reason
        return {"text": text, "end": end, "usage": usage_of_message(reply.usage)}

    def streamed():
        with client.messages.stream(**message) as stream:
            return stream.get_final_message()

    def counted():
        return client.messages.count_tokens(model="sim", messages=MESSAGES).input_tokens

    return {
        "message": lambda: facts(again(lambda: client.messages.create(**message))),
        "message stream": lambda: facts(again(streamed)),
        "count of tokens": counted,
        "models of Anthropic": lambda: sorted(model.id for model in client.models.list()),
        "model of Anthropic": lambda: client.models.retrieve("sim").id,
    }


def served(url):
    """The methods and paths that a router says it serves."""
    paths = httpx.get(f"{url}/openapi.json").raise_for_status().json()["paths"]
    return [(method, path) for path, methods in paths.items() for method in methods]
