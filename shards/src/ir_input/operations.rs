//! The operations that OpenVINO defines, as the `type` of a layer names them.
//!
//! **Source**: OpenVINO documentation, "Available Operation Sets", opset1 to opset17.

const NAMES: &str = "
    Abs Acos Acosh AdaptiveAvgPool AdaptiveMaxPool Add Asin Asinh Assign Atan Atanh AvgPool
    BatchNormInference BatchToSpace BinaryConvolution BitwiseAnd BitwiseLeftShift BitwiseNot
    BitwiseOr BitwiseRightShift BitwiseXor Broadcast Bucketize Ceiling Clamp Col2Im Concat Const
    Convert ConvertLike ConvertPromoteTypes Convolution ConvolutionBackpropData Cos Cosh CumSum DFT
    DepthToSpace Divide Einsum Elu EmbeddingBagOffsets EmbeddingBagOffsetsSum EmbeddingBagPacked
    EmbeddingBagPackedSum EmbeddingSegmentsSum Equal Erf ErfInv Exp ExtractImagePatches Eye
    FakeConvert FakeQuantize Floor FloorMod GRN GRUCell GRUSequence Gather GatherElements GatherND
    GatherTree Gelu Greater GreaterEqual GridSample GroupConvolution
    GroupConvolutionBackpropData GroupNormalization GroupedMatMul HSigmoid HSwish HardSigmoid IDFT
    IRDFT ISTFT Identity If Interpolate Inverse IsFinite IsInf IsNaN LRN LSTMCell LSTMSequence Less
    LessEqual Log LogSoftmax LogicalAnd LogicalNot LogicalOr LogicalXor Loop MVN MatMul MaxPool
    Maximum Minimum Mish Mod Multinomial Multiply Negative NonZero NormalizeL2 NotEqual OneHot
    PReLU Pad Parameter Power RDFT RNNCell RNNSequence RandomUniform Range ReLU ReadValue ReduceL1
    ReduceL2 ReduceLogicalAnd ReduceLogicalOr ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum
    Reshape Result Reverse ReverseSequence Roll Round STFT ScaledDotProductAttention
    ScatterElementsUpdate ScatterNDUpdate ScatterUpdate SearchSorted SegmentMax Select Selu ShapeOf
    ShuffleChannels Sigmoid Sign Sin Sinh Slice SliceScatter SoftMax SoftPlus SoftSign
    SpaceToBatch SpaceToDepth Split Sqrt SquaredDifference Squeeze StridedSlice Subtract Swish Tan
    Tanh TensorIterator Tile TopK Transpose Unique Unsqueeze VariadicSplit Xor
";

/// Whether OpenVINO has this operation in one of its numbered sets.
pub(super) fn is_known(kind: &str, opset: &str) -> bool {
    let number = opset.strip_prefix("opset").and_then(|number| number.parse::<u32>().ok());
    number.is_some_and(|number| number > 0) && NAMES.split_ascii_whitespace().any(|n| n == kind)
}
