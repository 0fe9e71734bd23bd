"""One model over several processes, on one machine or more: each rank holds a part of every layer and runs the same schedule."""
