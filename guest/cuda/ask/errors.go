package ask

import (
	"errors"
	"fmt"
)

var (
	// ErrDeadline means that the helper gave no answer in time, and was killed. What the
	// driver has done is not known: ask for the process's state.
	ErrDeadline = errors.New("the driver does not answer")
	// ErrStuck means that a helper was killed and has not ended: the driver does not let go
	// of it.
	ErrStuck = errors.New("a helper does not end: the driver does not let go of it")
	// ErrHelper means that the helper ended without an answer. What the driver has done is
	// not known.
	ErrHelper = errors.New("the helper ended without an answer")
	// ErrNoDriver means that this machine has no driver with the functions that are needed.
	ErrNoDriver = errors.New("no NVIDIA driver that can suspend processes")
	// ErrGone means that the process has ended.
	ErrGone = errors.New("the process has ended")
)

// Codes of the driver that decisions are made by (cuda.h, CUresult).
const (
	CodeInvalidValue  = 1
	CodeOutOfMemory   = 2
	CodeSystem        = 304 // CUDA_ERROR_OPERATING_SYSTEM
	CodeIllegalState  = 401
	CodeNotReady      = 600
	CodeNotPermitted  = 800
	CodeNotSupported  = 801
	codeNotInitialize = 3
)

// DriverError is the driver's refusal.
type DriverError struct {
	Op   Op
	PID  int
	Code int
	Name string // of the code, as CUDA_ERROR_OUT_OF_MEMORY
	// State is the process's state after it, if the driver told it.
	State State
}

func (e *DriverError) Error() string {
	return fmt.Sprintf("the driver refuses to %s pid %d: %s (%d)", verb(e.Op), e.PID, e.Name, e.Code)
}

func verb(o Op) string {
	switch o {
	case GetState:
		return "tell the state of"
	case Devices:
		return "list GPUs, asked for"
	}
	return string(o)
}

// NoCUDA reports whether the refusal of a GetState means that the process does not use
// CUDA. The driver says so of every process that it does not know.
func (e *DriverError) NoCUDA() bool {
	return e.Op == GetState && (e.Code == CodeSystem || e.Code == CodeInvalidValue || e.Code == codeNotInitialize)
}
