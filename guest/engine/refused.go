package engine

import (
	"strings"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// RefusedError contains the reasons why a target can't serve. The operation has changed
// nothing.
type RefusedError struct{ Reasons []*gpuctlv1.Reason }

func (e *RefusedError) Error() string {
	var words []string
	for _, r := range e.Reasons {
		words = append(words, r.Message)
	}
	if len(words) == 0 {
		return "refused by the target"
	}
	return strings.Join(words, "; ")
}

// Refuse returns a *RefusedError, or nil if there are no reasons.
func Refuse(rs []*gpuctlv1.Reason) error {
	if len(rs) == 0 {
		return nil
	}
	return &RefusedError{Reasons: rs}
}
