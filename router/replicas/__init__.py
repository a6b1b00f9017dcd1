"""Several routers over one cluster: each tells the others what it keeps workers busy with; any of them may die."""
