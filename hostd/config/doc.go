// Package config reads hostd's configuration: a YAML file with a version. Unknown keys
// are errors.
package config
