module github.com/kvtax/kvtax/kvindex/bench

go 1.25.0

require (
	github.com/kvtax/kvtax/kvindex v0.0.0
	github.com/ulikunitz/xz v0.5.17
)

require github.com/hashicorp/golang-lru/v2 v2.0.7 // indirect

replace github.com/kvtax/kvtax/kvindex => ..
