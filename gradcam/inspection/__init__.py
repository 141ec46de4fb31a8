"""Looking inside a network: what its layers give, what comes back to them, and changing that; hooks that leave no trace."""
