"""What every HTTP service and client of verst shares: the token, the limits, the terms of a request. No torch."""
