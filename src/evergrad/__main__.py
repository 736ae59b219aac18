"""`python -m evergrad` is the `evergrad` command."""

from evergrad.cli import main

if __name__ == "__main__":
    main()
