package main

import (
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/opencl/executor"
)

func probeCommand() *cobra.Command {
	var (
		library string
		env     []string
		devices []uint
		config  string
		ahead   ahead
	)
	cmd := &cobra.Command{
		Use:   "probe --library PATH",
		Short: "Report the devices of an OpenCL runtime as JSON",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			rt := &gpuctlv1.Runtime{Library: library, Env: map[string]string{}}
			if config != "" {
				if err := ahead.load(); err != nil {
					return err
				}
				b, err := io.ReadAll(io.LimitReader(cmd.InOrStdin(), maxConfig))
				if err != nil {
					return fmt.Errorf("runtime: %w", err)
				}
				if err := protojson.Unmarshal(b, rt); err != nil {
					return fmt.Errorf("runtime: %w", err)
				}
			}
			for _, kv := range env {
				k, v, ok := strings.Cut(kv, "=")
				if !ok || k == "" {
					return fmt.Errorf("--env %q is not NAME=VALUE", kv)
				}
				rt.Env[k] = v
				if err := os.Setenv(k, v); err != nil {
					return fmt.Errorf("--env %s: %w", k, err)
				}
			}
			for _, d := range devices {
				rt.Devices = append(rt.Devices, uint32(d))
			}
			resp, err := executor.Probe(rt)
			if err != nil {
				return err
			}
			b, err := protojson.Marshal(resp)
			if err != nil {
				return fmt.Errorf("encode: %w", err)
			}
			// The response has a line of its own, whatever the runtime has printed before.
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "\n%s\n", b)
			return err
		},
	}
	f := cmd.Flags()
	f.StringVar(&library, "library", "", "the vendor's ICD library")
	f.StringArrayVar(&env, "env", nil, "NAME=VALUE to set before the library is loaded")
	f.UintSliceVar(&devices, "device", nil, "only the device with this index")
	f.StringVar(&config, "runtime", "", "- for a gpuctl.v1.Runtime on standard input")
	ahead.flags(cmd)
	if err := f.MarkHidden("runtime"); err != nil {
		panic(err) // no such flag
	}
	cmd.MarkFlagsOneRequired("library", "runtime")
	cmd.MarkFlagsMutuallyExclusive("library", "runtime")
	return cmd
}
