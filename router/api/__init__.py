"""OpenAI's HTTP, spelled: request bodies, answers, errors. Pure: JSON values in and out."""
