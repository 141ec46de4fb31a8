"""Every provider with every task and every command."""
