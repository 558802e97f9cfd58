"""`python -m tocsin` is `tocsin`."""

from tocsin.cli.main import main

if __name__ == "__main__":
    main()
