package cl

import "strconv"

// Status is what an OpenCL function returned: Success or an error.
type Status int32

// Error gives OpenCL's name for the status.
func (s Status) Error() string {
	if n := s.name(); n != "" {
		return n
	}
	return "OpenCL status " + strconv.Itoa(int(s))
}

// String is Error.
func (s Status) String() string { return s.Error() }

// Err is nil for Success, else the status itself.
func (s Status) Err() error {
	if s == Success {
		return nil
	}
	return s
}
