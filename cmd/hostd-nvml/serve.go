package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/gpuctl/gpuctl/hostd/inventory/nvml"
)

// A call that hangs in the driver may outlive hostd by this.
const endGrace = 5 * time.Second

// serve answers requests until the input ends or it has released the driver.
func serve(c *collector, in io.Reader, out io.Writer) error {
	requests := make(chan nvml.Request)
	var readErr error
	stopped := make(chan struct{})
	defer close(stopped)
	go func() {
		defer close(requests)
		for {
			var r nvml.Request
			if readErr = nvml.ReadMessage(in, &r, nvml.MaxRequest); readErr != nil {
				if errors.Is(readErr, io.EOF) {
					readErr = nil
				}
				time.AfterFunc(endGrace, func() {
					select {
					case <-stopped:
					default:
						os.Exit(1)
					}
				})
				return
			}
			select {
			case requests <- r:
			case <-stopped:
				return
			}
		}
	}()
	for r := range requests {
		if err := nvml.WriteMessage(out, c.answer(r), nvml.MaxResponse); err != nil {
			return fmt.Errorf("answer: %w", err)
		}
		if r.Op == nvml.Release {
			return nil
		}
	}
	c.close()
	return readErr
}
