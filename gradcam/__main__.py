"""`python -m gradcam` is the command `gradcam`."""

from gradcam.cli import main

if __name__ == "__main__":
    main()
