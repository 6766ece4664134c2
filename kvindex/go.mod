module github.com/kvtax/kvtax/kvindex

go 1.25
