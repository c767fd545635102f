"""Ray: where the processes of a run live. The only package that imports ray."""
