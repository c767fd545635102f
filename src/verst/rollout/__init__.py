"""The rollout: prompts to groups of scored samples, one asyncio task for each microgroup."""
