"""The figures of this machine, each beside what PostgreSQL can do at best: `python -m bench [names…]`."""
