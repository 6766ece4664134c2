// SPDX-License-Identifier: Apache-2.0

package blockhash

// Keys are the extra keys of a block, a Python tuple: strings, byte strings, ints, and
// Keys. A block without any has nil, Python's None.
type Keys []any

// Extra is what decides beside its token ids what the blocks of a prompt hold.
type Extra struct {
	LoRA     string  // name of the adapter, empty for none
	LoRAPath string  // where vLLM 0.32 and later were told to load it from
	Salt     string  // cache_salt of the request, empty for none
	Images   []Image // and other inputs that are not text, by their place
}

// An Image is an input that stands in the prompt as a run of placeholder tokens.
type Image struct {
	ID     string // vLLM's identifier of it: a hash of its content
	Offset int    // the first of its tokens
	Tokens int
}

// A Style is how a release of vLLM writes extra keys.
type Style int

const (
	Bare   Style = iota // 0.18.1: an image is its identifier
	Placed              // 0.22 to 0.30: with its place in the block
	Tagged              // 0.32 and later: each key says what it is
)

// Styles returns the styles that differ for a prompt, one at least.
func (e *Extra) Styles() []Style {
	switch {
	case len(e.Images) > 0:
		return []Style{Bare, Placed, Tagged}
	case e.LoRA != "" || e.Salt != "":
		return []Style{Placed, Tagged}
	}
	return []Style{Tagged}
}

// Keys returns the extra keys of the block of tokens start to end (without) of a prompt:
// the adapter, the images that reach into the block, and in the first block the salt.
func (e *Extra) Keys(style Style, start, end int) Keys {
	var keys Keys
	if e.LoRA != "" {
		keys = append(keys, e.lora(style))
	}
	for _, image := range e.Images {
		if image.Offset < end && image.Offset+image.Tokens > start {
			keys = append(keys, image.key(style, start))
		}
	}
	if e.Salt != "" && start == 0 {
		if style == Tagged {
			keys = append(keys, Keys{tagSalt, e.Salt})
		} else {
			keys = append(keys, e.Salt)
		}
	}
	return keys
}

func (e *Extra) lora(style Style) any {
	if style == Tagged {
		return Keys{tagLoRA, e.LoRA, e.LoRAPath}
	}
	return e.LoRA
}

func (i *Image) key(style Style, start int) any {
	switch style {
	case Bare:
		return i.ID
	case Placed:
		return Keys{i.ID, i.Offset - start}
	}
	return Keys{tagImage, i.ID, i.Offset - start}
}

// Tagged returns what vLLM 0.32 and later hash for the keys of a block that are published
// without tags. That of a block with an adapter nobody can know who is not told its path.
func (k Keys) Tagged() Keys {
	if k == nil {
		return nil
	}
	tagged := Keys{}
	for _, key := range k {
		switch key := key.(type) {
		case string:
			tagged = append(tagged, Keys{tagSalt, key})
		case []byte:
			tagged = append(tagged, Keys{tagEmbeds, key})
		case Keys:
			tagged = append(tagged, append(Keys{tagImage}, key...))
		}
	}
	return tagged
}

const (
	tagEmbeds = "prompt_embeds"
	tagLoRA   = "lora"
	tagImage  = "mm"
	tagSalt   = "cache_salt"
)

func isTag(text string) bool {
	return text == tagLoRA || text == tagImage || text == tagSalt || text == tagEmbeds
}
