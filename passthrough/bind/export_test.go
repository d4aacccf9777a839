package bind

// SetStep has f called before every change of the journal.
func (j *Journal) SetStep(f func(what string) error) { j.step = f }

// ParseJournal is parseJournal.
var ParseJournal = parseJournal
