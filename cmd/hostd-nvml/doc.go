// Command hostd-nvml holds NVIDIA's management library for hostd, in a process
// of its own. hostd starts it and speaks with it over its standard input and
// output, as package hostd/inventory/nvml describes; it ends with its standard input.
//
// By hand, `hostd-nvml --once list` or `--once facts` prints what the library
// says of this machine's GPUs as JSON.
package main
