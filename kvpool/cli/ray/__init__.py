"""`kvpool up --ray`: the same cluster, placed, restarted and scaled by Ray. Nothing here is imported without that flag."""
