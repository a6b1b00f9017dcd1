"""The HTTP front door: text in, text out; it chooses workers and keeps a request alive while they come and go.

`text/` turns text into token ids and back, `api/` spells OpenAI's HTTP, `dispatch` carries one request through prefill and decode,
`policy` chooses, `index` remembers, `fleet` knows who lives. No torch in this process.
"""
