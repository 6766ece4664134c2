// SPDX-License-Identifier: Apache-2.0

package blockhash

import "encoding/binary"

// cbor writes what cbor2.dumps(value, canonical=True) writes for a few types (RFC 8949).
type cbor struct{ out []byte }

// Major types, in the upper three bits of the first byte.
const (
	majorUnsigned = 0 << 5
	majorNegative = 1 << 5
	majorBytes    = 2 << 5
	majorText     = 3 << 5
	majorArray    = 4 << 5
	cborNull      = 0xf6
)

func (c *cbor) seed(seed string) []byte {
	c.out = c.out[:0]
	c.text(seed)
	return c.out
}

func (c *cbor) block(parent []byte, ids []uint32, extra Keys) []byte {
	c.out = c.out[:0]
	c.head(majorArray, 3)
	c.binary(parent)
	c.head(majorArray, uint64(len(ids)))
	for _, id := range ids {
		c.head(majorUnsigned, uint64(id))
	}
	if extra == nil {
		c.out = append(c.out, cborNull)
	} else {
		c.array(extra)
	}
	return c.out
}

func (c *cbor) array(keys Keys) {
	c.head(majorArray, uint64(len(keys)))
	for _, key := range keys {
		switch key := key.(type) {
		case string:
			c.text(key)
		case []byte:
			c.binary(key)
		case int:
			c.integer(key)
		case Keys:
			c.array(key)
		}
	}
}

func (c *cbor) integer(value int) {
	if value < 0 {
		c.head(majorNegative, uint64(-1-value))
		return
	}
	c.head(majorUnsigned, uint64(value))
}

func (c *cbor) binary(data []byte) {
	c.head(majorBytes, uint64(len(data)))
	c.out = append(c.out, data...)
}

func (c *cbor) text(text string) {
	c.head(majorText, uint64(len(text)))
	c.out = append(c.out, text...)
}

// head writes a major type and its argument, as short as it can be.
func (c *cbor) head(major byte, argument uint64) {
	switch {
	case argument < 24:
		c.out = append(c.out, major|byte(argument))
	case argument < 1<<8:
		c.out = append(c.out, major|24, byte(argument))
	case argument < 1<<16:
		c.out = binary.BigEndian.AppendUint16(append(c.out, major|25), uint16(argument))
	case argument < 1<<32:
		c.out = binary.BigEndian.AppendUint32(append(c.out, major|26), uint32(argument))
	default:
		c.out = binary.BigEndian.AppendUint64(append(c.out, major|27), argument)
	}
}
