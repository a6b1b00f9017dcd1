"""`python -m decode_worker`: run one decode worker until SIGTERM or SIGINT."""

from kvpool.engine.command import command

main = command("decode")

if __name__ == "__main__":
    main()
