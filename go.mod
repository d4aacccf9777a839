module github.com/gpuctl/gpuctl

go 1.26.8
