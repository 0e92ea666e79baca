"""Computation that is local to a shard, and the exchanges between shards."""
