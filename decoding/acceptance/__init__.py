"""How a step decides which drafted tokens stay. One module a rule; `docs/methods.md` compares them."""
