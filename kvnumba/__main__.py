"""``python -m kvnumba``: the command line."""

from kvnumba.cli import main

if __name__ == "__main__":
    main()
