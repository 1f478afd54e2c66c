"""What the tests share: engines, router, prompts, waiting."""
