"""One suite that every executor passes: `test_conformance.py` states the contract of `tocsin.worker.executors.Executor`
as seen from the other side of the worker protocol, with a real worker process.

To add a kind: write a `Harness` (see `harness.py`) in a module of its own beside `process.py`, and name it in
`HARNESSES` of `conftest.py`. A harness says what must be there for it to run at all (`missing`), sets up what it needs
(`__aenter__`), and gives for each of the deeds in `harness.Deed` a target document that does it, or the reason why
its kind has no such thing. Nothing in the suite itself is of any kind.
"""
