module kvtax/proxy_load

go 1.22
