// Package config reads hostd's configuration: a small, versioned YAML file in
// which nothing unknown is accepted.
package config
