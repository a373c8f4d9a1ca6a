"""What follows from the figures: budgets, contexts, limits and capacities."""
