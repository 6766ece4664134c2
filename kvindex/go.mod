module kvtax/kvindex

go 1.25
