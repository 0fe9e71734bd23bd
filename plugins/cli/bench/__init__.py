"""``oarlock bench`` and the harness behind it, which the programs in ``benchmarks/`` share. It knows no workload of theirs."""
