"""The command line as `python -m pipejax`."""

from pipejax.cli import main

if __name__ == "__main__":
    main()
