module kvtax/bench_proxy

go 1.22
