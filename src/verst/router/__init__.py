"""One address for several engines: which engine a request goes to, and how its answer comes back. No torch."""
