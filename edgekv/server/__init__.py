"""The local server: OpenAI's interface over one runtime, for clients that exist already.

    options.py    what can be set
    guard.py      who may ask: key, host, origin
    requests.py   a request's JSON -> Call; what is not supported is refused by name
    toolgrammar.py  the grammar of a call that must be made
    answers.py    Call -> events -> response; a client that goes away stops its answer
    dialogues.py  whose cache is kept, by session_id
    replies.py    events -> OpenAI's objects
    problems.py   errors in OpenAI's shape
    metrics.py    what happened, for Prometheus
    page/         the chat page
    app.py        the routes          run.py   the process

One answer is made at a time, in the order of the requests (edgekv/aio.py); a bounded number waits, more are told to
come back (429). Nothing here is imported by `import edgekv`; starlette and uvicorn are the extra `serve`.
"""
