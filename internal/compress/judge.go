package compress

import "time"

// Meter knows how fast a connection is.
type Meter interface {
	// Rate returns the bytes of a second that the connection took while it was waited for, or
	// 0 if it was not waited for lately.
	Rate() float64
	// Forget drops what was measured.
	Forget()
}

const (
	// leastLong is the size in bytes of pieces that are worth a look.
	leastLong = 16 << 10
	// mostTrust is after how many bytes the connection is measured anew, without compressing.
	mostTrust = 64 << 20
	// Spots of a piece that show whether it can be compressed.
	spots     = 4
	spotBytes = 4 << 10
	// leastSampled is the size in bytes of pieces of which a sample is compressed first.
	leastSampled = 4 * spots * spotBytes
	// A sample is compressed more slowly than a piece, by less than that.
	sampleSlowness = 4
	// mostSkip is how many pieces are sent as they are, without a look, after one of which
	// compressing would have been of no use.
	mostSkip = 7
	// mostSlow is how often compressing may be too slow before its speed is measured anew: the
	// processor may have been somebody else's when it was measured.
	mostSlow = 16
)

// judge decides for each piece whether it is compressed.
type judge struct {
	meter Meter
	now   func() time.Time

	speed float64 // bytes a second that are compressed; 0: not known
	guess bool    // speed is that of a sample
	slow  int     // pieces for which that was too little
	on    bool    // the last piece was compressed
	left  int     // bytes until the connection is measured anew
	skip  int     // pieces that are not looked at
	step  int
}

// worth reports whether compressing pays, for a connection of link bytes a second, when speed
// bytes a second become 1/ratio of what they were. Sending waits for compressing. What is not
// yet done has to pay a tenth.
func worth(link, speed, ratio float64, on bool) bool {
	most := 0.9
	if on {
		most = 1
	}
	return ratio > 1 && link/speed+1/ratio < most
}

// wants reports whether a piece is to be compressed. try compresses and returns the size.
func (j *judge) wants(b []byte, try func(...[]byte) []byte) bool {
	if j.meter == nil || len(b) < leastLong {
		return false
	}
	if j.left -= len(b); j.left <= 0 {
		j.left = mostTrust
		j.meter.Forget()
	}
	link := j.meter.Rate()
	if link == 0 {
		j.on = false
		return false
	}
	if j.skip > 0 {
		j.skip--
		return false
	}
	if j.speed != 0 && !worth(link, j.speed, 1e9, j.on) { // whatever is in it
		if j.slow++; j.slow < mostSlow {
			j.on = false
			return false
		}
		j.speed = 0
	}
	j.slow = 0
	if j.speed != 0 && len(b) < leastSampled {
		return true // did looks at it
	}
	var sample [spots][]byte
	for i := range sample {
		at := (len(b) - spotBytes) / (spots - 1) * i
		sample[i] = b[at : at+spotBytes]
	}
	began := j.now()
	ratio := spots * spotBytes / float64(len(try(sample[:]...)))
	if j.speed == 0 {
		j.speed, j.guess = sampleSlowness*spots*spotBytes/max(j.now().Sub(began).Seconds(), 1e-9), true
	}
	if worth(link, j.speed, ratio, j.on) {
		return true
	}
	j.refuse()
	return false
}

// refuse notes that compressing was of no use.
func (j *judge) refuse() {
	j.on = false
	j.step = min(2*j.step+1, mostSkip)
	j.skip = j.step
}

// did notes that n bytes were compressed to short ones, and reports whether that is shorter by
// enough to be sent.
func (j *judge) did(n, short int, took time.Duration) bool {
	if took > 0 {
		speed := float64(n) / took.Seconds()
		if j.speed != 0 && !j.guess {
			speed = (3*j.speed + speed) / 4
		}
		j.speed, j.guess = speed, false
	}
	if !worth(j.meter.Rate(), j.speed, float64(n)/float64(short), true) {
		j.refuse() // what follows
	} else {
		j.on, j.step = true, 0
	}
	return short <= n-n/16
}
