"""The ranks: how they start, exchange values, agree on a run, and end if one of them hangs."""
