package wide

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// Do divides n bytes into parts of grain bytes, the last of which may be shorter, and works on
// them with all processors. It returns when all are done.
func Do(n, grain int, work func(off, end int)) {
	if n <= grain {
		work(0, n)
		return
	}
	var wg sync.WaitGroup
	var next atomic.Int64
	for range min(runtime.NumCPU(), (n+grain-1)/grain) {
		wg.Go(func() {
			for {
				off := int(next.Add(int64(grain))) - grain
				if off >= n {
					return
				}
				work(off, min(off+grain, n))
			}
		})
	}
	wg.Wait()
}

// Try is Do for work that can fail. It returns one of the errors.
func Try(n, grain int, work func(off, end int) error) error {
	var first atomic.Pointer[error]
	Do(n, grain, func(off, end int) {
		if err := work(off, end); err != nil {
			first.CompareAndSwap(nil, &err)
		}
	})
	if err := first.Load(); err != nil {
		return *err
	}
	return nil
}
