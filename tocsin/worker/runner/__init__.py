"""The process in which a module's functions are called: `python -m tocsin.worker.runner module:app …`."""
