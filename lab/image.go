package lab

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// image is what the hosts boot from, in one folder of the cache.
type image struct{ dir string }

func (i image) path(name string) string { return filepath.Join(i.dir, name) }

// digest names the content of files and folders, with their paths below root but
// without tests.
func digest(root string, paths ...string) (string, error) {
	h := sha256.New()
	for _, p := range paths {
		err := filepath.WalkDir(filepath.Join(root, p), func(path string, e fs.DirEntry, err error) error {
			if err != nil || e.IsDir() || strings.HasSuffix(path, "_test.go") {
				return err
			}
			rel, err := filepath.Rel(root, path)
			if err != nil {
				return err
			}
			info, err := e.Info()
			if err != nil {
				return err
			}
			fmt.Fprintf(h, "%s %v %d\n", rel, info.Mode().Perm()&0o111 != 0, info.Size())
			f, err := os.Open(path) //nolint:gosec // our own repository
			if err != nil {
				return err
			}
			defer f.Close()
			_, err = io.Copy(h, f)
			return err
		})
		if err != nil {
			return "", err
		}
	}
	return hex.EncodeToString(h.Sum(nil))[:16], nil
}

// build makes the image, or finds it in the cache. The tree with the packages
// is kept apart, so that a change of the configuration does not fetch them anew.
func (l *Lab) build(ctx context.Context) (image, error) {
	baseKey, err := digest(l.source, "image/base.sh", "image/provision.sh")
	if err != nil {
		return image{}, err
	}
	key, err := digest(l.source, "image", "guestinit")
	if err != nil {
		return image{}, err
	}
	img := image{filepath.Join(l.cache, "image-"+key)}
	if _, err := os.Stat(img.dir); err == nil {
		return img, nil
	}
	tree := filepath.Join(l.cache, "base-"+baseKey)
	if _, err := os.Stat(tree); errors.Is(err, fs.ErrNotExist) {
		if err := l.keepOnly("base-", baseKey); err != nil {
			return image{}, err
		}
		if err := l.step(ctx, "build the hosts' system", "base.log", asRoot(filepath.Join(l.source, "image/base.sh"), tree)...); err != nil {
			return image{}, err
		}
	}
	if err := errors.Join(l.keepOnly("image-", key), l.keepOnly("ready-", "")); err != nil {
		return image{}, err
	}
	init := filepath.Join(l.cache, "guestinit")
	if err := l.step(ctx, "build the guests' init", "init.log", "env", "CGO_ENABLED=0",
		"go", "build", "-C", l.source, "-trimpath", "-ldflags=-s -w", "-o", init, "./guestinit"); err != nil {
		return image{}, err
	}
	if err := l.step(ctx, "build the image", "image.log", asRoot(filepath.Join(l.source, "image/build.sh"), tree, init, img.dir)...); err != nil {
		return image{}, err
	}
	return img, nil
}

// asRoot is a command that becomes root if it is not.
func asRoot(argv ...string) []string {
	if os.Geteuid() == 0 {
		return argv
	}
	return append([]string{"sudo", "--preserve-env=GPUCTL_LAB_MIRROR"}, argv...)
}

// step runs a command that takes long; what it says goes to a file of the cache.
func (l *Lab) step(ctx context.Context, what, log string, argv ...string) error {
	done := l.progress.Start(what)
	var out bytes.Buffer
	c := exec.CommandContext(ctx, argv[0], argv[1:]...)
	c.Stdout, c.Stderr = &out, &out
	err := c.Run()
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	done(err)
	path := filepath.Join(l.cache, log)
	if werr := os.WriteFile(path, out.Bytes(), 0o644); werr != nil && err == nil {
		err = werr
	}
	if err != nil {
		return fmt.Errorf("%s: %w\n%s\n(all of it: %s)", what, err, lastLines(out.String(), 12), path)
	}
	return nil
}

// lastLines returns the last n lines of s.
func lastLines(s string, n int) string {
	lines := strings.Split(strings.TrimRight(s, "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// inUse tells which folders of the cache hosts of any instance run from.
func (l *Lab) inUse() (map[string]bool, error) {
	states, err := filepath.Glob(filepath.Join(l.cache, "run*", "*", "state.json"))
	if err != nil {
		return nil, err
	}
	used := make(map[string]bool)
	for _, p := range states {
		h := &Host{Name: filepath.Base(filepath.Dir(p)), dir: filepath.Dir(p)}
		if s, err := h.current(); err == nil {
			used[s.Image], used[s.Ready] = true, true
		}
	}
	return used, nil
}

// keepOnly removes what the cache holds under a prefix but one, and but what
// runs.
func (l *Lab) keepOnly(prefix, key string) error {
	old, err := filepath.Glob(filepath.Join(l.cache, prefix+"*"))
	if err != nil {
		return err
	}
	used, err := l.inUse()
	if err != nil {
		return err
	}
	for _, p := range old {
		if filepath.Base(p) == prefix+key || used[p] {
			continue
		}
		if err := exec.Command("mountpoint", "-q", filepath.Join(p, "proc")).Run(); err == nil {
			return fmt.Errorf("%s: something is mounted below; umount %s/proc and try again", p, p)
		}
		argv := asRoot("rm", "-rf", "--one-file-system", p)
		if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("remove %s: %w: %s", p, err, out)
		}
	}
	return nil
}
