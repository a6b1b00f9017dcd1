"""`python -m prefill_worker`: run one prefill worker until SIGTERM or SIGINT."""

from kvpool.engine.command import command

main = command("prefill")

if __name__ == "__main__":
    main()
