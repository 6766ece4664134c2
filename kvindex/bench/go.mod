module kvtax/kvindex/bench

go 1.25.0

require (
	github.com/ulikunitz/xz v0.5.17
	kvtax/kvindex v0.0.0
)

replace kvtax/kvindex => ..
