package session

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/guest/confine"
	"github.com/gpuctl/gpuctl/internal/beneath"
)

// Files of suspended sessions are where their user or an operator wants them, and contain
// what an application wants. gpuguest may be root. It creates, renames and deletes these
// files with the rights of the user who asked for them, or, if that is not known, with
// those of the session's user. So they belong to that user.

// owner returns the owner of the file that the session is suspended to.
func (s *session) owner() (fileOwner, error) {
	s.mu.Lock()
	o := s.rec.FileOwner
	s.mu.Unlock()
	if o != nil {
		return *o, nil
	}
	uid, err := confine.Owner(s.executorsDir())
	if err != nil {
		return fileOwner{}, fmt.Errorf("user of session %s: %w", s.id, err)
	}
	return fileOwner{uid, uid}, nil
}

// owned runs f with the owner's rights on files.
func (s *session) owned(f func() error) error {
	o, err := s.owner()
	if err != nil {
		return err
	}
	return confine.AsOwner(o.UID, o.GID, f)
}

// createState creates the file, writes to the journal which it is, and passes it to the executor.
func (s *session) createState(ctx context.Context, e *executor, path string) error {
	var f *os.File
	err := s.owned(func() (err error) {
		f, err = beneath.OpenFile(filepath.Dir(path), filepath.Base(path), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		return err
	})
	if err != nil {
		if errors.Is(err, fs.ErrPermission) {
			return fmt.Errorf("%w: who asks for the file must be allowed to make it, and without that the session's user, as in /var/tmp", err)
		}
		return err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	if err := s.update(func(r *record) { r.Op.Written = &inode{Dev: st.Dev, Ino: st.Ino} }); err != nil {
		return err
	}
	return e.give(ctx, path, f)
}

// openState passes the file of a suspended session to the executor.
func (s *session) openState(ctx context.Context, e *executor, path string) error {
	var f *os.File
	err := s.owned(func() (err error) {
		f, err = beneath.OpenFile(filepath.Dir(path), filepath.Base(path), os.O_RDONLY, 0)
		return err
	})
	if err != nil {
		return err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	o, err := s.owner()
	if err != nil {
		return err
	}
	if os.Geteuid() != 0 { // this process has created the file
		o.UID = uint32(os.Geteuid())
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); !ok || st.Uid != o.UID {
		return fmt.Errorf("%s is not the file that session %s was suspended to", path, s.id)
	}
	return e.give(ctx, path, f)
}

// removeState deletes a file of the session, if the file exists.
func (s *session) removeState(path string) error {
	err := s.owned(func() error { return unix.Unlink(path) })
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	return nil
}

// removeWritten deletes the file that the session's suspend has written. One that another session
// or somebody else has given that name stays.
func (s *session) removeWritten(path string) error {
	s.mu.Lock()
	var id *inode
	if s.rec.Op != nil {
		id = s.rec.Op.Written
	}
	s.mu.Unlock()
	if id == nil {
		return nil
	}
	err := s.owned(func() error {
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil || st.Dev != id.Dev || st.Ino != id.Ino {
			return err
		}
		return unix.Unlink(path)
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	return nil
}

// finishState makes a finished file durable and renames it.
func (s *session) finishState(part, path string) error {
	return s.owned(func() error { return syncRename(part, path) })
}
