package lab

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
)

// ComputeImage is the root of guests that run OpenCL programs under gpuctl: two
// squashfs files of this machine, one over the other. Their names tell their
// content.
type ComputeImage struct {
	Base  string // Debian with OpenCL runtimes
	Layer string // gpuguest of the working tree, and programs that use OpenCL
}

// ComputeImage builds what is not in the cache of the image. The base is made
// once, in two minutes; the layer whenever what is in it has changed, in half a
// minute.
func (l *Lab) ComputeImage(ctx context.Context) (*ComputeImage, error) {
	if _, err := exec.LookPath("mksquashfs"); err != nil {
		return nil, fmt.Errorf("lab: %w; lab/setup.sh installs what it needs", err)
	}
	unlock, err := l.lockCache(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	img := new(ComputeImage)
	if img.Base, err = l.computeBase(ctx); err != nil {
		return nil, fmt.Errorf("lab: %w", err)
	}
	if img.Layer, err = l.computeLayer(ctx); err != nil {
		return nil, fmt.Errorf("lab: %w", err)
	}
	return img, nil
}

func (l *Lab) computeBase(ctx context.Context) (string, error) {
	key, err := digest(l.source, "guestimage/base.sh")
	if err != nil {
		return "", err
	}
	return l.cached("guestbase-", key, func(path string) error {
		return l.step(ctx, "build the guests' system", "guestbase.log", asRoot(filepath.Join(l.source, "guestimage/base.sh"), path)...)
	})
}

func (l *Lab) computeLayer(ctx context.Context) (string, error) {
	root := filepath.Dir(l.source)
	files, err := digest(root, "packaging/deb", "guest/opencl/icd", "lab/guestimage/layer.sh", "lab/guestimage/rc.sh", "test/cl/Makefile", "test/cl/clx.h",
		"test/cl/endure.c", "test/cl/stream.c", "test/cuda/Makefile", "test/cuda/cudaloop.c", "test/cuda/fakecard.c", "test/cuda/fake")
	if err != nil {
		return "", err
	}
	// What the compiler calls the program and all that it is made of.
	c := exec.CommandContext(ctx, "go", "list", "-C", root, "-deps", "-export", "-trimpath", "-f", "{{.ImportPath}} {{.BuildID}}", "./cmd/gpuguest")
	c.Env = append(os.Environ(), "CGO_ENABLED=1")
	parts, err := c.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			err = fmt.Errorf("%w\n%s", err, lastLines(string(exit.Stderr), 12))
		}
		return "", fmt.Errorf("gpuguest: %w", err)
	}
	sum := sha256.Sum256(append([]byte(files+"\n"), parts...))
	return l.cached("guestlayer-", hex.EncodeToString(sum[:])[:16], func(path string) error {
		return l.step(ctx, "build the guests' programs", "guestlayer.log", filepath.Join(l.source, "guestimage/layer.sh"), path)
	})
}

// cached returns a file of the cache, made by build if it is not there. Others
// of that prefix are removed.
func (l *Lab) cached(prefix, key string, build func(path string) error) (string, error) {
	key += ".squashfs"
	path := filepath.Join(l.cache, prefix+key)
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		return path, err
	}
	if err := l.keepOnly(prefix, key); err != nil {
		return "", err
	}
	return path, build(path)
}
